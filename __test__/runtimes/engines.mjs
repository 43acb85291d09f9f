// JavaScript runtimes. Bun and Deno run the contract of the API on every store, with their own test runners. The versions of Node run
// a smoke test: CI runs all tests on each of them.
import { join } from 'node:path'
import { RUNTIMES, toolsOf } from '../consumers/tools.mjs'

/** @import { Case, Context } from '../consumers/tools.mjs' */

const { packaged, run } = toolsOf(RUNTIMES)

/**
 * The stores, and the variables with the URLs of their servers.
 *
 * @type {Record<string, string | undefined>}
 */
const STORES = {
  memory: undefined,
  sqlite: undefined,
  redis: 'HOLDFAST_TEST_REDIS_URL',
  mongodb: 'HOLDFAST_TEST_MONGODB_URL',
  'mongodb-replica-set': 'HOLDFAST_TEST_MONGODB_RS_URL',
}

/**
 * Returns the URL of a store's server; `undefined` if it has none.
 *
 * @param {Context['urls']} urls
 * @param {string} kind
 */
const urlOf = (urls, kind) => urls[STORES[kind] ?? '']

/**
 * Runs a program on each store at the same time: most tests wait. Resolves to the results.
 *
 * @param {Context['urls']} urls
 * @param {(kind: string) => Promise<string>} test
 */
async function onEachStore(urls, test) {
  const kinds = Object.keys(STORES).filter((kind) => !STORES[kind] || urlOf(urls, kind))
  const results = await Promise.allSettled(kinds.map((kind) => test(kind)))
  const failures = results.flatMap((result, i) =>
    result.status === 'rejected' ? [`${kinds[i]}: ${result.reason.message}`] : [],
  )
  if (failures.length > 0) throw new Error(failures.join('\n'))
  return results.map((result, i) => `${kinds[i]}${result.status === 'fulfilled' ? result.value : ''}`).join(', ')
}

/**
 * Runs the contract. `counted` finds the number of passed tests in the output.
 *
 * @param {string} program
 * @param {string[]} args
 * @param {RegExp} counted
 * @param {Context} context
 */
const contract = (program, args, counted, { urls }) =>
  onEachStore(urls, async (kind) => {
    const env = { ...urls, HOLDFAST_KIND: kind }
    const printed = await run(program, [...args, join(RUNTIMES, 'contract.spec.mjs')], { env, all: true })
    const count = counted.exec(printed)
    if (!count) throw new Error(`it printed no count:\n${printed}`)
    return `: ${count[1]} tests`
  })

/** @param {number} version @returns {Case} */
const node = (version) => ({
  name: `Node.js ${version}`,
  of: `node-${version}`,
  run: ({ urls, temp }) => {
    /** @type {Record<string, string>} */
    const targets = { memory: 'memory:smoke', sqlite: `sqlite:${join(temp, 'locks.sqlite')}` }
    const program = packaged(`node-${version}`, 'bin/node')
    return onEachStore(urls, async (kind) => {
      await run(program, [join(RUNTIMES, 'smoke.mjs'), 'holdfast', targets[kind] ?? urlOf(urls, kind)])
      return ''
    })
  },
})

/** @type {Case[]} */
export const engines = [
  node(20),
  node(22),
  node(24),
  {
    name: 'Bun',
    of: '@oven/bun-linux-x64',
    run: (context) =>
      contract(packaged('@oven/bun-linux-x64', 'bin/bun'), ['test', '--timeout', '90000'], /^ *(\d+) pass$/m, context),
  },
  {
    name: 'Deno',
    of: '@deno/linux-x64-glibc',
    run: (context) => {
      const args = ['test', '--allow-all', '--no-lock', '--no-check']
      return contract(packaged('@deno/linux-x64-glibc', 'deno'), args, /\((\d+) steps\) \| 0 failed/, context)
    },
  },
]
