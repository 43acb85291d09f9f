// The workload of the profile for the optimised build (pgo.mjs): the calls that must be fast.
//
//   node scripts/workload.mjs MS:STORE…    runs each part for MS milliseconds; the URLs of a quorum are separated by commas
import { createRequire } from 'node:module'
import { setTimeout as sleep } from 'node:timers/promises'

const { LockService } = createRequire(import.meta.url)('../index.js')

const parameters = process.argv.slice(2).flatMap((text) => [...text.matchAll(/^(\d+):(.+)$/g)])
if (parameters.length === 0 || parameters.length < process.argv.length - 2)
  throw new Error('usage: node scripts/workload.mjs MS:STORE…')

/**
 * Runs `work` in `inFlight` concurrent loops, each with its own name, for `ms` milliseconds.
 *
 * @param {number} ms
 * @param {number} inFlight
 * @param {string} prefix
 * @param {(name: string) => Promise<void>} work
 */
async function busily(ms, inFlight, prefix, work) {
  const end = performance.now() + ms
  const names = Array.from({ length: inFlight }, (_, i) => `workload:${prefix}:${i}`)
  await Promise.all(
    names.map(async (name) => {
      do await work(name)
      while (performance.now() < end)
    }),
  )
}

/** @param {number} ms @param {import('../index.js').LockService} locks @param {import('../index.js').LockService} other */
async function parts(ms, locks, other) {
  for (const inFlight of [1, 16, 64, 1024]) {
    await busily(ms, inFlight, 'pair', async (name) => {
      if (!(await locks.acquireLock(name, 30)) || !(await locks.releaseLock(name)))
        throw new Error(`${name} was not free`)
    })
    await busily(ms, inFlight, 'lock', async (name) => {
      const lock = await locks.acquire(name, { ttlMs: 30_000 })
      if (!(await lock.release())) throw new Error(`${name} was lost`)
    })
  }
  const held = Array.from({ length: 64 }, (_, i) => `workload:held:${i}`)
  await Promise.all(held.map((name) => other.acquireLock(name, 600)))
  for (const inFlight of [1, 64]) {
    await busily(ms, inFlight, 'held', async (name) => {
      if (await locks.acquireLock(name, 30)) throw new Error(`${name} was not held`)
    })
  }
  await Promise.all(held.map((name) => other.releaseLock(name)))
  // All calls wait for one name, from two services.
  await busily(ms, 20, 'queue', (name) => {
    const service = Number(name.split(':').at(-1)) % 2 === 0 ? locks : other
    return service.using('workload:queue', { waitMs: 60_000 }, () => {})
  })
  const names = Array.from({ length: 1000 }, (_, i) => `workload:lease:${i}`)
  const leases = await Promise.all(names.map((name) => locks.acquire(name, { ttlMs: 10_000 })))
  await sleep(ms > 1000 ? 4000 : 0)
  await Promise.all(leases.map((lease) => lease.release()))
}

for (const [, ms, store] of parameters) {
  const target = store.includes(',') ? store.split(',') : store
  const [locks, other] = await Promise.all([LockService.connect(target), LockService.connect(target)])
  await parts(Number(ms), locks, other)
  await Promise.all([locks.close(), other.close()])
}
