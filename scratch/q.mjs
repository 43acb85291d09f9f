import { startPostgres } from '../scripts/postgres.mjs'
import pg from 'pg'
import { readdirSync, readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
const fsync = process.env.FSYNC !== 'off'
const server = await startPostgres({ fsync, settings: { shared_preload_libraries: 'pg_stat_statements', 'pg_stat_statements.track': 'all', 'pg_stat_statements.track_planning': process.env.PLAN ? 'on' : 'off' } })
const admin = new pg.Client({ connectionString: server.url }); await admin.connect()
await admin.query('CREATE EXTENSION pg_stat_statements')
if (!process.env.STAT) { await admin.query("ALTER SYSTEM SET pg_stat_statements.track='none'"); await admin.query('SELECT pg_reload_conf()') }
const which = (process.argv[2] ?? 'holdfast').split(',')
const loads = (process.argv[3] ?? '1,64,256').split(',').map(Number)
const ms = Number(process.argv[4] ?? 2000)
const cpu = () => { let t = 0; for (const d of readdirSync('/proc')) if (/^\d+$/.test(d)) try { const v = readFileSync(`/proc/${d}/stat`, 'latin1'); if (v.includes('(postgres)')) { const f = v.split(') ')[1].split(' '); t += Number(f[11]) + Number(f[12]) } } catch {} return t * 10000 }
for (const name of which) {
  const [file, variant = ''] = name.split('/')
  const { connect } = await import(`../bench/contenders/${file}.mjs`)
  const c = await connect({ urls: [server.url] }, variant)
  for (const n of loads) {
    const run = async (ms) => { const end = performance.now() + ms; let count = 0; await Promise.all(Array.from({ length: n }, async (_, i) => { while (performance.now() < end) { await c.pair(`${name}-${i}`); count++ } })); return count }
    await run(ms / 3)
    if (process.env.STAT) await admin.query('SELECT pg_stat_statements_reset()')
    const own = process.cpuUsage(); const s0 = cpu(); const t0 = performance.now()
    const count = await run(ms)
    const el = performance.now() - t0; const s1 = cpu(); const o = process.cpuUsage(own)
    console.log(`${name} x${n}: ${(count / el * 1000).toFixed(0)} pairs/s, server ${((s1 - s0) / count).toFixed(0)} us/pair, client ${((o.user + o.system) / count).toFixed(0)} us/pair`)
    if (process.env.STAT) { const { rows } = await admin.query(`SELECT calls, rows, round(mean_exec_time::numeric*1000) us, round(mean_plan_time::numeric*1000) plan_us, left(regexp_replace(query, '\\s+', ' ', 'g'), 90) q FROM pg_stat_statements ORDER BY total_exec_time DESC LIMIT 6`); console.table(rows); const z = await admin.query("SELECT pg_relation_size('holdfast_locks') s").catch(()=>({rows:[]})); console.log(z.rows[0]) }
  }
  await c.close()
}
await admin.end(); await server.stop()
