// oncePer: one run per period, whichever process calls first.
import assert from 'node:assert/strict'
import { assertFree, rejection, rejects, sleep, until, waiting } from '../tools.mjs'

export function oncePer(test) {
  test('oncePer runs a job once per period', async (store) => {
    const services = await store.connectAll(3)
    let runs = 0
    // A call that waits for 1 s, the default, gives the store 1 s to answer.
    const options = { periodMs: '8s', ttlMs: '10s', waitMs: '3s' }
    const tick = () => Promise.all(services.map((service) => service.oncePer('job', options, () => ++runs)))
    const began = Date.now()
    const first = await tick()
    assert.equal(first.filter(({ ran }) => ran).length, 1)
    assert.deepEqual(first.find(({ ran }) => ran).value, 1)
    const again = await tick()
    if (Date.now() - began < 8000) assert.equal(runs, 1)
    assert.equal(again.filter(({ ran }) => ran).length, runs - 1)
    await until('the next period', async () => (await services[0].oncePer('job', options, () => ++runs)).ran)
    assert.ok(Date.now() - began >= 7900, 'the name was free before the period had passed')
    store.mayLeaveLocks = true
  })

  test('after an error of the job, another process runs it at once', async (store) => {
    const [a, b] = await store.connectAll(2)
    const thrown = new Error('from fn')
    assert.equal(
      await rejection(
        a.oncePer('job', { periodMs: '1h' }, () => {
          throw thrown
        }),
      ),
      thrown,
    )
    await assertFree(b, 'job')
    let fail
    const failing = rejection(a.oncePer('wait', { periodMs: '1h' }, () => new Promise((_, reject) => (fail = reject))))
    await until('the job', () => fail)
    const waits = b.oncePer('wait', { periodMs: '1h', waitMs: '60s' }, () => 'in its place')
    await waiting(b, 1)
    fail(thrown)
    assert.equal(await failing, thrown)
    assert.deepEqual(await waits, { ran: true, value: 'in its place' })
    store.mayLeaveLocks = true
  })

  test('a period does not begin for a job that lost its lock', async (store) => {
    const [a, b] = await store.connectAll(2)
    const lost = a.oncePer('job', { periodMs: '1h', ttlMs: 1500 }, async (lock) => {
      await b.forceRelease('job')
      await until('the loss', () => lock.signal.aborted)
      await sleep(10)
    })
    await rejects(lost, 'LOCK_LOST', { key: 'job' })
    await assertFree(b, 'job')
  })
}
