// A tracer, Next.js, and tsx. `consumers/` has the bundlers.
import { spawn } from 'node:child_process'
import { cpSync, mkdirSync, readdirSync, rmSync } from 'node:fs'
import { createRequire } from 'node:module'
import { dirname, join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { freePort } from '../../scripts/servers.mjs'
import { CONSUMERS, ENTRY, messages, mustBeEmpty, RUNTIMES, toolsOf } from '../consumers/tools.mjs'

const { mustWork, packaged, runPackaged } = toolsOf(RUNTIMES)
const require = createRequire(join(RUNTIMES, 'package.json'))
const NEXT_APP = join(RUNTIMES, 'next')
const START_LIMIT_MS = 60_000

/**
 * Starts a Next server, and asks its one route.
 *
 * @param {string} folder
 */
async function askNext(folder) {
  const port = String(await freePort())
  const env = { ...process.env, PORT: port, HOSTNAME: '127.0.0.1', NODE_ENV: /** @type {const} */ ('production') }
  const server = spawn(process.execPath, [join(folder, 'server.js')], { cwd: folder, env, stdio: 'ignore' })
  try {
    for (const end = performance.now() + START_LIMIT_MS; performance.now() < end && server.exitCode === null;) {
      const response = await fetch(`http://127.0.0.1:${port}/lock`).catch(() => undefined)
      if (response) return { status: response.status, body: await response.text() }
      await sleep(50)
    }
    throw new Error('the server of Next did not answer')
  } finally {
    server.kill('SIGKILL')
  }
}

/** @type {import('../consumers/tools.mjs').Case[]} */
export const frameworks = [
  {
    name: '@vercel/nft',
    of: '@vercel/nft',
    async run({ temp }) {
      packaged('@vercel/nft')
      const { fileList, warnings } = await require('@vercel/nft').nodeFileTrace([ENTRY], { base: CONSUMERS })
      mustBeEmpty('warnings', messages([...warnings]))
      for (const file of fileList) {
        mkdirSync(dirname(join(temp, file)), { recursive: true })
        cpSync(join(CONSUMERS, file), join(temp, file))
      }
      await mustWork(process.execPath, ['bundle.cjs'], { cwd: temp })
    },
  },
  {
    name: 'Next.js, standalone',
    of: 'next',
    async run({ temp }) {
      const built = join(NEXT_APP, '.next')
      rmSync(built, { recursive: true, force: true })
      const env = { NEXT_TELEMETRY_DISABLED: '1', NODE_ENV: 'production' }
      await runPackaged('next', 'dist/bin/next', ['build'], { cwd: NEXT_APP, env })
      cpSync(join(built, 'standalone'), temp, { recursive: true, verbatimSymlinks: true })
      rmSync(built, { recursive: true, force: true })
      const server = readdirSync(temp, { recursive: true }).find((file) =>
        /^(?!.*node_modules).*\bserver\.js$/.test(String(file)),
      )
      if (!server) throw new Error('the build has no server.js')
      const { status, body } = await askNext(dirname(join(temp, String(server))))
      if (status !== 200 || body !== 'true true') throw new Error(`the route answered ${status}: ${body}`)
    },
  },
  {
    name: 'tsx',
    of: 'tsx',
    run: () => mustWork(process.execPath, [packaged('tsx', 'dist/cli.mjs'), 'tsx.mts']),
  },
]
