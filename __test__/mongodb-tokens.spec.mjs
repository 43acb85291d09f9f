// Fencing tokens on a MongoDB replica set, where a grant is one write and the token is the time of that write.
import assert from 'node:assert/strict'
import { once } from 'node:events'
import net from 'node:net'
import { proxySuite } from './proxy.mjs'
import { assertGrowing, later } from './tools.mjs'

proxySuite('mongodb-replica-set', 'the tokens of grants by one write', {}, (test) => {
  for (const names of [['n'], ['m', 'n']]) {
    test(`a write that the driver repeated is no grant of a lost lock (${names.length} names)`, async (fixture) => {
      const { direct, proxy } = fixture
      const locks = await fixture.warm({ storeTimeoutMs: 15_000 })
      const before = await direct.acquire(names)
      assert.equal(await before.release(), true)
      // The server inserts the document, and the reply is lost. The driver repeats the command, and the server replies that it
      // was executed, with the time of its last write.
      const dropped = proxy.dropReply(fixture.key('n'))
      const call = later(locks.tryAcquire(names))
      await dropped
      await proxy.down()
      assert.equal(await direct.forceRelease('n'), true)
      const next = await direct.acquire('n')
      await proxy.up()
      assert.equal(await call, null)
      assert.equal((await direct.inspect('n'))?.fencingToken, next.fencingToken)
      assert.equal(next.isHeld, true)
      assert.equal(await next.release(), true)
      const last = await direct.acquire(names)
      assertGrowing([before, next, last].map((lock) => lock.fencingToken))
      assert.equal(await last.release(), true)
    })

    test(`a write that the driver repeated is a grant of a lock that is still held (${names.length} names)`, async (fixture) => {
      const { direct, proxy } = fixture
      const locks = await fixture.warm({ storeTimeoutMs: 15_000 })
      const dropped = proxy.dropReply(fixture.key('n'))
      const call = later(locks.tryAcquire(names))
      await dropped
      proxy.cut()
      const lock = (await call) ?? assert.fail('it is busy')
      for (const name of names) assert.equal((await direct.inspect(name))?.fencingToken, lock.fencingToken)
      assert.equal(await lock.release(), true)
      const next = await direct.acquire(names)
      assertGrowing([lock, next].map((lock) => lock.fencingToken))
      assert.equal(await next.release(), true)
    })
  }

  test('a rollback that the server executes late does not free a later grant of the same call', async (fixture) => {
    const { direct, proxy, server } = fixture
    const locks = await fixture.warm({ storeTimeoutMs: 15_000 })
    const other = await direct.acquire('y')
    /** @type {Promise<Buffer>} */
    const rollback = new Promise((resolve) => {
      proxy.intercept = (data, connection) => {
        if (!data.includes('delete') || !data.includes(fixture.key('x'))) return false
        proxy.intercept = undefined
        // While the connection breaks, both names become free.
        void Promise.all([direct.forceRelease('x'), other.release()]).then(() => connection.cut())
        resolve(data)
        return true
      }
    })
    const call = later(locks.tryAcquire(['x', 'y']))
    const request = await rollback
    const lock = (await call) ?? assert.fail('it is busy')
    const socket = net.connect(server.port, '127.0.0.1')
    socket.write(request)
    await once(socket, 'data')
    socket.destroy()
    assert.equal(await direct.tryAcquire('x'), null, 'two holders')
    assert.equal((await direct.inspect('x'))?.fencingToken, lock.fencingToken)
    assert.equal(await lock.release(), true)
  })
})
