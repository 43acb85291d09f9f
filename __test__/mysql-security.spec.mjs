// TLS, sockets and logins on MariaDB, and servers that are another product, read-only, or nodes of a cluster. MariaDB has no users with
// caching_sha2_password: `mysql-server.spec.mjs` tests them on MySQL's own server.
import assert from 'node:assert/strict'
import { startMariadb } from '../scripts/mysql.mjs'
import { mysql } from './drivers/mysql.mjs'
import { startProxy } from './proxy.mjs'
import { security } from './suites/security.mjs'
import { warningsOf } from './tools.mjs'

security(mysql, ({ test, works, refused, servers }) => {
  test('another product is refused by its version, and a read-only server gives a warning', async () => {
    const other = await startMariadb({ settings: { version: '8.0.11-TiDB-v7.5.1' } })
    try {
      await refused(other.url, {}, /this server is TiDB \(8\.0\.11-TiDB-v7\.5\.1/)
    } finally {
      await other.stop()
    }
    const { users: plain } = servers
    await works(plain.url)
    await mysql.query(plain, 'SET GLOBAL read_only = 1')
    try {
      assert.match(await warningsOf(plain.url), /^HOLDFAST_STORE .* is read-only, such as a replica/)
    } finally {
      await mysql.query(plain, 'SET GLOBAL read_only = 0')
    }
  })

  test('a database that does not exist, and missing privileges', async () => {
    const of = (user, database) => `mysql://${user}@127.0.0.1:${servers.users.port}/${database}`
    await mysql.query(servers.users, 'CREATE USER reader; CREATE DATABASE empty; GRANT SELECT ON empty.* TO reader')
    await refused(
      of('holdfast', 'none'),
      {},
      /Unknown database 'none' \[1049\] \(check the database in the URL and in the option table, or create it/,
    )
    // A user without privileges on all databases cannot see whether one exists.
    const noAccess =
      /'none' \[1044\] \(the database does not exist, or the user has no privileges on it: create the database, or GRANT them\)/
    await refused(of('reader', 'none'), {}, noAccess)
    const noPrivilege = /CREATE command denied .*`locks` \[1142\] \(the user needs .*SELECT, INSERT, UPDATE and DELETE/
    await refused(of('reader', 'empty'), {}, noPrivilege)
  })

  test('a warning of a cluster that accepts writes on several nodes', async (t) => {
    const proxy = await startProxy(servers.users.port)
    t.after(() => proxy.close())
    const target = servers.users.url.replace(`:${servers.users.port}`, `:${proxy.port}`)
    const [galera, group] = ['wsrep_cluster_size', 'group_replication_single_primary_mode']
    for (const [sent, name, value, isReported] of /** @type {const} */ ([
      ['SHOW GLOBAL STATUS LIKE', galera, '1', false],
      ['SHOW GLOBAL STATUS LIKE', galera, '3', true],
      ['SHOW GLOBAL VARIABLES LIKE', group, 'ON', false],
      ['SHOW GLOBAL VARIABLES LIKE', group, 'OFF', true],
    ])) {
      const statement = `${sent} '${name}'`
      let isReplaced = false
      // The server answers like a node of a cluster.
      proxy.intercept = (data) => {
        const at = data.indexOf(statement)
        if (at >= 0) data.write(`SELECT '${name}', '${value}'`.padEnd(statement.length), at)
        isReplaced ||= at >= 0
        return false
      }
      const text = await warningsOf(target)
      assert.ok(isReplaced, statement)
      if (!isReported) assert.equal(text, '')
      else assert.match(text, /^HOLDFAST_STORE \S+ is a node of a cluster that accepts writes on several nodes/)
    }
  })
})
