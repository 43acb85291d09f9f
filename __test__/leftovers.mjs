// Lists what is stored under a prefix, read by other clients than holdfast: locks without a caller, queues, metadata.
import { LockService } from '../index.js'
import { EtcdClient } from './etcd-client.mjs'
import { withMongo } from './mongodb-client.mjs'
import { withMysql } from './mysql-client.mjs'
import { withPostgres } from './postgres-client.mjs'
import { openRedis } from './redis-client.mjs'
import { entriesOf, folderOf, withZookeeper } from './zookeeper-client.mjs'

/**
 * Lists what a store holds for the names of one prefix: `[{ what: 'lock' | 'queue' | 'metadata', name }]`.
 *
 * - `engine`, `target` and `options` are those of `LockService.connect`.
 * - A memory store has no other client: the list is empty.
 * - MongoDB keeps the document of an expired lease until its TTL monitor deletes it, within a minute: `isExpired`. It keeps that of a shared name
 *   for an hour, which is left out if the name has neither holders nor waiters.
 * - The records on Redis are left out. They outlive the lease on purpose and expire.
 */
export function leftovers({ engine, target, options }) {
  return READERS[engine](target, options)
}

const READERS = {
  memory: async () => [],
  // Another SQLite client in this process would drop this process's file locks when it closes the file.
  sqlite: async (target, options) => {
    const service = await LockService.connect(target, options)
    try {
      return (await service.list()).map(({ name }) => ({ what: 'lock', name }))
    } finally {
      await service.close()
    }
  },
  redis: async (target, { keyPrefix }) => {
    const clients = redisClients(target)
    try {
      const found = await Promise.all(clients.map((client) => keysOf(client, keyPrefix)))
      return found.flat()
    } finally {
      for (const client of clients) client.disconnect()
    }
  },
  mongodb: (target, { keyPrefix = '', collection = 'locks' }) =>
    withMongo(target, async (client) => {
      const isExpired = { $and: [{ $ne: [{ $type: '$expiresAt' }, 'missing'] }, { $lte: ['$expiresAt', '$$NOW'] }] }
      const list = { $concatArrays: [{ $ifNull: ['$holders', []] }, { $ifNull: ['$queue', []] }] }
      const live = { $filter: { input: list, as: 'e', cond: { $gt: ['$$e.until', '$$NOW'] } } }
      const projection = { isExpired, isUsed: { $gt: [{ $size: live }, 0] } }
      const documents = await client.db().collection(collection).find({}, { projection }).toArray()
      return documents
        .filter(({ _id, isUsed }) => isUsed || typeof _id === 'string')
        .map(({ _id, isExpired }) => ({ name: String(/** @type {any} */ (_id).shared ?? _id), isExpired }))
        .filter(({ name }) => name.startsWith(keyPrefix))
        .map(({ name, isExpired }) => ({ what: 'lock', name: name.slice(keyPrefix.length), isExpired }))
    }),
  // A free name keeps its row for an hour, and a position that expired a minute ago stays until a sweep, within ten minutes.
  postgres: (target, { keyPrefix = '', table = 'holdfast.locks' }) =>
    withPostgres(target, async (client) => {
      const { rows } = await client.query(
        `SELECT 'lock' AS what, name, expires_at <= now() AS "isExpired" FROM ${table} WHERE owner IS NOT NULL
         UNION ALL SELECT 'queue', name, false FROM ${table}_waiters WHERE alive_until > now() - interval '1 minute'`,
      )
      return ofRows(rows, keyPrefix)
    }),
  // An entry of a waiter has no `since`, until its process notes the hand-off.
  etcd: async (target, { keyPrefix }) =>
    (await new EtcdClient(target).list(keyPrefix)).map(({ key, value }) => ({
      what: JSON.parse(value).since ? 'lock' : 'queue',
      name: key.slice(keyPrefix.length, key.lastIndexOf('/')),
    })),
  mysql: (target, { keyPrefix = '', table = 'locks' }) =>
    withMysql(target, async (client) => {
      const [rows] = await client.query(
        `SELECT 'lock' AS what, name, expires_at <= 1e6 * UNIX_TIMESTAMP(NOW(6)) AS isExpired FROM ${table}
         WHERE owner IS NOT NULL UNION ALL SELECT 'queue', name, false FROM ${table}_waiters`,
      )
      return ofRows(rows, keyPrefix)
    }),
  // Folders are containers, which the server removes.
  zookeeper: (target, { keyPrefix = '' }) =>
    withZookeeper(target, async (client) => {
      const folders = (await client.children('/')).filter((folder) => folder.startsWith(folderOf(keyPrefix)))
      const found = folders.map(async (folder) => {
        const name = decodeURIComponent(folder).slice(keyPrefix.length)
        const entries = await entriesOf(client, `/${folder}`)
        return entries.map((_, index) => ({ what: index === 0 ? 'lock' : 'queue', name }))
      })
      return (await Promise.all(found)).flat()
    }),
}

/** Returns the leftovers that rows of SQL tables describe, without the prefix of their names. */
const ofRows = (rows, keyPrefix) =>
  rows
    .map(({ what, name, isExpired }) => ({ what, name: name.toString(), isExpired: Boolean(isExpired) }))
    .filter(({ name }) => name.startsWith(keyPrefix))
    .map(({ name, ...rest }) => ({ ...rest, name: name.slice(keyPrefix.length) }))

/** Opens one client for each server that holds keys. */
function redisClients(target) {
  if (Array.isArray(target)) return target.map((url) => openRedis(url))
  const { protocol, host, pathname } = new URL(
    target.replace(/^(\S+:\/\/)([^/]*)/, (_, scheme, hosts) => scheme + hosts.split(',')[0]),
  )
  const [, list] = /** @type {RegExpExecArray} */ (/^[^/]+\/\/([^/]*)/.exec(target))
  const hosts = list.split(',').map((each) => new URL(`redis://${each}`))
  if (protocol === 'redis+cluster:') return hosts.map((url) => openRedis(url.href))
  if (protocol === 'redis+sentinel:') {
    const sentinels = hosts.map(({ hostname, port }) => ({ host: hostname, port: Number(port) }))
    return [openRedis({ sentinels, name: pathname.slice(1) })]
  }
  return [openRedis(`redis://${host}`)]
}

async function keysOf(client, prefix) {
  const found = []
  for (let cursor = '0'; ;) {
    const [next, keys] = await client.scan(cursor, 'MATCH', `*${prefix}*`, 'COUNT', 5000)
    for (const key of keys) {
      const [, companion] = /^holdfast:(\w+):/.exec(key) ?? []
      if (companion === 'fence') continue
      found.push({ what: companion ?? 'lock', name: key.slice(key.indexOf(prefix) + prefix.length).replace(/}$/, '') })
    }
    if (next === '0') return found
    cursor = next
  }
}
