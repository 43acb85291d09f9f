import { startPostgres } from '../scripts/postgres.mjs'
import pg from 'pg'
import { readFileSync } from 'node:fs'
const server = await startPostgres({ fsync: false })
const c = new pg.Client({ connectionString: server.url }); await c.connect()
const f = (n) => readFileSync(new URL(`../src/engine/sql/postgres/statements/${n}.sql`, import.meta.url), 'utf8')
const sub = (t) => t.replaceAll('{grant}', f('single/grant')).replaceAll('{locks}', 'locks').replaceAll('{waiters}', 'locks_waiters').replaceAll('{queue_index}', 'qi').replaceAll('{process_index}', 'pi')
await c.query(sub(f('schema')))
const rows = Number(process.argv[2] ?? 0)
if (rows) { await c.query(`INSERT INTO locks SELECT ('x'||i)::bytea, NULL, i, '-infinity' FROM generate_series(1,${rows}) i`); if (process.argv[3]) await c.query('ANALYZE locks') }
await c.query(`PREPARE a1(bytea,text,bigint,text,bigint,text) AS ${sub(f('single/acquire_one'))}`)
await c.query(`PREPARE a(bytea[],text[],bigint[],text[],bigint[],text[]) AS ${sub(f('single/acquire'))}`)
await c.query(`PREPARE r1(bytea,text) AS ${sub(f('single/release_one'))}`)
await c.query(`PREPARE r(bytea[],text[]) AS ${sub(f('single/release'))}`)
await c.query(`PREPARE h(bytea[]) AS ${sub(f('single/holders'))}`)
const arr = (n, v) => `ARRAY[${Array.from({ length: n }, (_, i) => v(i)).join(',')}]`
const N = 40
for (let i = 0; i < 8; i++) {
  const last = i === 7 ? 'EXPLAIN (ANALYZE, BUFFERS, COSTS OFF) ' : ''
  const show = async (q) => { const x = await c.query(last + q); if (last) console.log(x.rows.map((r) => r['QUERY PLAN']).join('\n') + '\n') }
  await show(`EXECUTE a1('n','o',30000,'h',1,NULL)`)
  await show(`EXECUTE r1('n','o')`)
  await show(`EXECUTE a(${arr(N, (i) => `'n${i}'::bytea`)},${arr(N, (i) => `'o${i}'`)},${arr(N, () => 30000)},${arr(N, () => `'h'`)},${arr(N, () => 1)},${arr(N, () => 'NULL::text')})`)
  await show(`EXECUTE h(${arr(N, (i) => `'n${i}'::bytea`)})`)
  await show(`EXECUTE r(${arr(N, (i) => `'n${i}'::bytea`)},${arr(N, (i) => `'o${i}'`)})`)
}
console.table((await c.query('select left(statement,60) s, generic_plans, custom_plans from pg_prepared_statements')).rows)
await c.end(); await server.stop()
