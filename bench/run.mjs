// Measures every contender in one run: processes of their own, taken in turn, several rounds, medians.
//
//   npm run bench               writes bench/results.md
//   npm run bench -- --quick    a smoke test: that every contender works, not how fast
import { fork } from 'node:child_process'
import { writeFileSync } from 'node:fs'
import { cpus } from 'node:os'
import { fileURLToPath } from 'node:url'
import { installDependencies } from '../scripts/setup.mjs'
import { startMongod, startRedis } from '../scripts/servers.mjs'
import { releaseBuild } from './build.mjs'
import { contenderVersions, serverVersion, table, withMajority } from './report.mjs'

const quick = process.argv.includes('--quick')
const here = new URL('.', import.meta.url)
const ROUNDS = quick ? 1 : 7
const MS = quick ? 100 : 1000
const WARM_UP_MS = quick ? 50 : 1500

installDependencies()
installDependencies('bench')
// What lies beside index.js may be a debug build: figures come from a release build, whatever is there.
if (!quick) process.env.NAPI_RS_NATIVE_LIBRARY_PATH = releaseBuild()

const mongodb = { store: 'mongodb', contenders: ['holdfast', 'gist', 'mongodb-lock', 'now-upsert'], inFlight: [1, 64, 256] }
const fields = [
  { store: 'redis', start: startRedis, contenders: ['holdfast', 'ioredis', 'redlock', 'redis-semaphore'], inFlight: [1, 64, 1024] },
  { ...mongodb, start: startMongod },
  { ...mongodb, start: () => startMongod({ replicaSet: true }), urlOf: withMajority },
]
const PACKAGES = ['ioredis', 'redlock', 'redis-semaphore', 'mongodb', 'mongodb-lock', 'mongodb3']

function start(module, url) {
  const child = fork(fileURLToPath(new URL('contender.mjs', here)), [module, url])
  const answer = () =>
    new Promise((resolve, reject) => {
      child.once('message', resolve)
      child.once('exit', (code) => reject(new Error(`${module} ended with ${code}`)))
    })
  const ready = answer()
  return {
    module,
    ready,
    ask(message) {
      const answered = answer()
      child.send(message)
      return answered.finally(() => child.removeAllListeners('exit'))
    },
    close() {
      return new Promise((resolve) => {
        child.once('exit', resolve)
        child.send({ what: 'close' })
      })
    },
  }
}

const sections = []
for (const { store, start: startServer, urlOf = (url) => url, contenders, inFlight } of fields) {
  const server = await startServer()
  const running = contenders.map((module) => start(module, urlOf(server.url)))
  await Promise.all(running.map((contender) => contender.ready))
  const results = {}
  const loads = inFlight.map((count) => ({ what: 'pair', inFlight: count }))
  for (const load of loads) {
    for (const contender of running) await contender.ask({ ...load, ms: WARM_UP_MS })
    for (let round = 0; round < ROUNDS; round++) {
      // Whoever goes first in a round goes last in the next: a drift of the machine hits all alike.
      const order = round % 2 === 0 ? running : [...running].reverse()
      for (const contender of order) {
        const result = await contender.ask({ ...load, ms: MS })
        ;((results[contender.module] ??= {})[load.inFlight] ??= []).push(result)
      }
    }
  }
  await Promise.all(running.map((contender) => contender.close()))
  sections.push(await table({ store, version: await serverVersion(store, server.url), results, inFlight }))
  await server.stop()
}

const report = [
  '# Benchmark',
  '',
  `${cpus().length} × ${cpus()[0].model}, Node ${process.version}, servers on loopback. ${ROUNDS} rounds of ${MS} ms per ` +
    'cell, interleaved; medians, with the range in brackets. A pair is one acquire and one release of a free name.',
  '',
  'On a standalone MongoDB holdfast’s writes wait for the journal (`w=majority`), and the others’ do not: that is what the ' +
    'driver does by default. On the replica set all write with `w=majority`; it has one member, so a majority is the ' +
    'journal of that one, and nothing travels.',
  '',
  `Versions: ${contenderVersions(PACKAGES)}.`,
  '',
  ...sections,
].join('\n')
console.log(report)
if (!quick) writeFileSync(new URL('results.md', here), report)
