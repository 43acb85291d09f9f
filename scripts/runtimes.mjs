// `npm run check:runtimes`: uses holdfast in other runtimes, bundlers, test runners, and with other package managers. Prints a table
// and a count. Arguments select cases by a part of their name: `npm run check:runtimes -- bun deno`.
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { consumers } from '../__test__/consumers/cases.mjs'
import { install } from '../__test__/consumers/installed.mjs'
import { CONSUMERS, runCase, RUNTIMES, Skip, versionOf } from '../__test__/consumers/tools.mjs'
import { engines } from '../__test__/runtimes/engines.mjs'
import { frameworks } from '../__test__/runtimes/frameworks.mjs'
import { packageManagers } from '../__test__/runtimes/package-managers.mjs'
import { startMongod, startRedis } from './servers.mjs'
import { installDependencies, serversDir } from './setup.mjs'

const SERVERS = {
  HOLDFAST_TEST_REDIS_URL: () => startRedis(),
  HOLDFAST_TEST_MONGODB_URL: () => startMongod(),
  HOLDFAST_TEST_MONGODB_RS_URL: () => startMongod({ replicaSet: true }),
}

process.chdir(fileURLToPath(new URL('..', import.meta.url)))
process.env.HOLDFAST_SERVERS_DIR ||= serversDir()
// Optional packages, for example the binaries of other runtimes, are those of some platforms.
for (const folder of ['__test__/consumers', '__test__/runtimes']) installDependencies(folder, { isLenient: true })

/** @param {unknown} error */
const messageOf = (error) => (error instanceof Error ? error.message : String(error))

const wanted = process.argv.slice(2).map((word) => word.toLowerCase())
/** The cases of each folder with packages. */
const cases = [
  ...[...engines, ...frameworks, ...packageManagers].map((tested) => ({ tested, folder: RUNTIMES })),
  ...consumers.map((tested) => ({ tested, folder: CONSUMERS })),
].filter(({ tested }) => wanted.length === 0 || wanted.some((word) => tested.name.toLowerCase().includes(word)))

/**
 * Runs one case. Resolves to a row of the table.
 *
 * @param {typeof cases[number]} each
 */
async function rowOf({ tested, folder }) {
  const { name, of } = tested
  const began = performance.now()
  const row = { name, version: versionOf(folder, of), result: 'passed', text: '' }
  try {
    row.text = await runCase(tested, urls)
  } catch (error) {
    row.result = error instanceof Skip ? 'skipped' : 'FAILED'
    row.text = messageOf(error)
  }
  const seconds = ((performance.now() - began) / 1000).toFixed(1)
  console.log(`${row.result.padEnd(8)}${`${seconds} s`.padStart(8)}  ${name} ${row.version}`)
  if (row.result === 'FAILED') console.log(row.text)
  return { ...row, seconds }
}

for (const folder of [CONSUMERS, RUNTIMES]) install(join(folder, 'node_modules'))
/** @type {Awaited<ReturnType<typeof startRedis>>[]} */
const servers = []
/** @type {Record<string, string>} */
const urls = {}
/** @type {string[]} */
const missing = []
await Promise.all(
  Object.entries(SERVERS).map(async ([variable, start]) => {
    try {
      const server = await start()
      servers.push(server)
      urls[variable] = server.url
    } catch (error) {
      missing.push(`no server for ${variable}: ${messageOf(error)}`)
    }
  }),
)
/** @type {Awaited<ReturnType<typeof rowOf>>[]} */
const rows = []
try {
  // Outside of CI a store without a server is left out.
  if (process.env.CI && missing.length > 0) throw new Error(missing.join('\n'))
  for (const message of missing) console.log(`left out: ${message}`)
  for (const each of cases) rows.push(await rowOf(each))
} finally {
  await Promise.all(servers.map((server) => server.stop()))
}

/** @param {string[]} cells */
const line = (cells) => `| ${cells.join(' | ')} |`
console.log(`\n${line(['runtime', 'version', 'result', 's', ''])}\n|---|---|---|---|---|`)
for (const { name, version, result, seconds, text } of rows)
  console.log(line([name, version, result, seconds, text.split('\n')[0]]))
/** @param {string} result */
const count = (result) => rows.filter((row) => row.result === result).length
console.log(`\n${count('passed')} passed, ${count('FAILED')} failed, ${count('skipped')} skipped`)
// In CI every case must run.
const failures = count('FAILED') + (process.env.CI ? count('skipped') : 0)
process.exitCode = failures === 0 && rows.length > 0 ? 0 : 1
