// The contenders: how a candidate of each is started, and on which store.
import { execFileSync } from 'node:child_process'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { locateEtcd, startEtcd } from '../../scripts/etcd.mjs'
import { locateMongod, locateRedis, startMongod, startRedis } from '../../scripts/servers.mjs'

const here = fileURLToPath(new URL('.', import.meta.url))
const [CANDIDATE, JOB, CLI] = ['candidate.mjs', 'job.mjs', '../../bin/holdfast.mjs'].map((file) => join(here, file))

/** A candidate that is a process with the job in it. */
const library = (kind) => (task) => [process.execPath, CANDIDATE, kind, JSON.stringify(task)]
const job = ({ id, file }) => [process.execPath, JOB, id, file]
const seconds = (ms) => String(ms / 1000)

/**
 * By name. `isCommand`: the job is a process of its own, which the contender starts.
 *
 * @typedef {{ id: string, url: string, name: string, ttlMs: number, file: string }} Task
 * @typedef {{ store: string, isCommand?: boolean, settings: string, argv: (task: Task) => string[] }} Contender
 * @type {Record<string, Contender>}
 */
export const CONTENDERS = {
  'holdfast elect, Redis': { store: 'redis', settings: '`locks.elect`', argv: library('elect') },
  'holdfast elect, MongoDB': { store: 'mongodb', settings: '`locks.elect`', argv: library('elect') },
  'holdfast run, Redis': {
    store: 'redis',
    isCommand: true,
    settings: '`holdfast run --wait forever NAME -- node job.mjs`',
    argv: ({ url, name, ttlMs, ...task }) => [
      process.execPath,
      CLI,
      'run',
      '--url',
      url,
      '--ttl',
      `${ttlMs}ms`,
      '--wait',
      'forever',
      name,
      '--',
      ...job(task),
    ],
  },
  'etcd3 Election': {
    store: 'etcd',
    settings:
      '`client.election(name, ttl).campaign(id)`, which stops the job at `error` and campaigns again after 1 s, as its documentation shows (5 s there)',
    argv: library('campaign'),
  },
  'etcdctl lock': {
    store: 'etcd',
    isCommand: true,
    settings: '`etcdctl lock --ttl S NAME node job.mjs`',
    argv: ({ url, name, ttlMs, ...task }) => [
      'etcdctl',
      '--endpoints',
      url,
      'lock',
      '--ttl',
      seconds(ttlMs),
      name,
      ...job(task),
    ],
  },
  'nestjs-redlock-universal @Redlock': {
    store: 'redis',
    settings: '`@Redlock({ key, ttl })` with its default retries; called again after each failure',
    argv: library('decorator'),
  },
  'nestjs-redlock-universal using': {
    store: 'redis',
    settings: '`RedlockService.using`, with a job that ends when its `signal` aborts; called again after each failure',
    argv: library('using'),
  },
}

/** Starts etcd. Its URL is that of the contenders. */
async function startEtcdOverHttp() {
  const server = await startEtcd()
  return Object.assign(server, { url: server.url.replace('etcd', 'http') })
}

/** The servers by store. Each keeps what it acknowledged when it restarts; `redis-empty` keeps nothing. */
export const STORES = {
  redis: () => startRedis({ args: ['--appendonly', 'yes', '--appendfsync', 'always'] }),
  'redis-empty': () => startRedis(),
  mongodb: () => startMongod({ replicaSet: true }),
  etcd: startEtcdOverHttp,
}

/** Lists the versions of the servers. */
export async function serverVersions() {
  const paths = { Redis: await locateRedis(), MongoDB: await locateMongod(), etcd: await locateEtcd() }
  return Object.entries(paths).map(([name, path]) => {
    const text = execFileSync(path, ['--version'], { encoding: 'utf8' })
    return `${name} ${/(?:v=|version:? |version v)(\d[\d.]*)/i.exec(text)?.[1]}`
  })
}
