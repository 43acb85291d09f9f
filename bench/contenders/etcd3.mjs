// The npm package etcd3: its lock, and a bare put and delete of a key.
import { setTimeout as sleep } from 'node:timers/promises'
import { Etcd3, EtcdLockFailedError } from 'etcd3'

export const kind = 'library'
export const packages = ['etcd3']
export const does = 'owner check, by an etcd lease for each lock; no fencing token; renews by a timer; polling'
export const variants = { bare: { kind: 'driver', does: 'no lock: a key is written and deleted' } }
export const settings = {
  '': '`lock(name).ttl(30)`, `acquire()` and `release()`; waits by attempts',
  bare: '`put(name)` and `delete().key(name)`, both awaited',
}

export async function connect({ urls: [url] }, variant) {
  const client = new Etcd3({ hosts: url.replace('etcd://', 'http://').split(',') })
  const acquire = (name) => client.lock(name).ttl(30).acquire()
  return {
    async pair(name) {
      if (variant === 'bare') {
        await client.put(name).value('')
        await client.delete().key(name)
      } else {
        const lock = await acquire(name)
        await lock.release()
      }
    },
    async wait(name, retryMs) {
      for (;;) {
        try {
          const lock = await acquire(name)
          return () => lock.release()
        } catch (error) {
          if (!(error instanceof EtcdLockFailedError)) throw error
          await sleep(retryMs)
        }
      }
    },
    close: () => client.close(),
  }
}
