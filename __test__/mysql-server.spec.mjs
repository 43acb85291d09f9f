// The contract on MySQL's own server (the other specs use MariaDB), its certificates, and its logins with `caching_sha2_password`.
import assert from 'node:assert/strict'
import { after, describe, it } from 'node:test'
import { LockService } from '../index.js'
import { locateMysql, startMysql } from '../scripts/mysql.mjs'
import { contract } from './contract.mjs'
import { withMysql } from './mysql-client.mjs'
import { missing, skip } from './stores.mjs'
import { rejects } from './tools.mjs'

const reason =
  missing('mysql') ??
  (await locateMysql().then(
    () => undefined,
    (error) => `no MySQL: ${error.message}`,
  ))
if (reason) it('MySQL', (t) => skip(t, reason))
else {
  const server = /** @type {any} */ (await startMysql())
  after(() => server.stop())
  const withoutTls = `${server.url}?ssl-mode=DISABLED`
  // The server's own certificate is for no name.
  const tls = { caFile: server.caFile }

  describe('MySQL: logins', { concurrency: 1 }, () => {
    const user = server.url.replace('holdfast@', 'sha:geheim@')

    it('a password that the server does not remember is sent over TLS only', async () => {
      await withMysql(server.url, async (client) => {
        await client.query("CREATE USER sha IDENTIFIED WITH caching_sha2_password BY 'geheim'")
        await client.query('GRANT ALL ON holdfast.* TO sha')
      })
      const error = await rejects(LockService.connect(`${user}?ssl-mode=DISABLED`), 'LOCK_STORE', { retryable: false })
      assert.match(error.message, /caching_sha2_password/)
      assert.match(error.message, /ssl-mode/)
      assert.ok(!error.message.includes('geheim'), error.message)
      for (let login = 0; login < 2; login++) {
        const locks = await LockService.connect(`${user}?ssl-mode=VERIFY_CA`, { tls })
        assert.equal(await locks.using('n', (lock) => lock.isHeld), true)
        await locks.close()
      }
      // Now it remembers the password, and needs only a digest.
      const locks = await LockService.connect(`${user}?ssl-mode=DISABLED`)
      assert.equal(await locks.using('n', (lock) => lock.isHeld), true)
      await locks.close()
    })

    it('a wrong password, and a certificate of the server itself, are explained', async () => {
      const wrong = server.url.replace('holdfast@', 'sha:falsch@')
      const refused = await rejects(LockService.connect(`${wrong}?ssl-mode=VERIFY_CA`, { tls }), 'LOCK_STORE')
      assert.match(refused.message, /\[1045\]/)
      const unknown = await rejects(LockService.connect(server.url), 'LOCK_STORE', { retryable: false })
      assert.match(unknown.message, /tls\.caFile/)
    })
  })

  process.env.HOLDFAST_TEST_MYSQL_URL = withoutTls
  contract('mysql')
}
