// The types of `holdfast/testing`. An expectation without an error is an error itself.
import { LockService, type ConnectOptions } from '../../index.js'
import { createTestLocks, type TestLocks, type TestLocksOptions } from '../../testing.js'

export async function usage(maybe: { options?: TestLocksOptions | undefined }) {
  const t: TestLocks = await createTestLocks(maybe.options)
  const { locks, connect, lose, advance, close } = t
  const services: LockService[] = [locks, await connect(), await connect({ defaults: { ttlMs: '5m' } })]
  await createTestLocks({ onEvent: (event) => event.type, storeTimeoutMs: 1000 })
  const none: void = await lose('n')
  await lose('n', { shared: true })
  await advance(5)
  await advance('1h')
  await close()
  await t[Symbol.asyncDispose]()
  const disposable: AsyncDisposable = t
  const options: ConnectOptions = maybe.options ?? {}
  return { services, none, disposable, options }
}

export async function mistakes(t: TestLocks) {
  // @ts-expect-error the store has no address
  await createTestLocks('memory:')
  // @ts-expect-error an option of other stores
  await createTestLocks({ keyPrefix: 'p' })
  // @ts-expect-error a name is needed
  await t.lose()
  // @ts-expect-error one name
  await t.lose(['a', 'b'])
  // @ts-expect-error a duration is needed
  await t.advance()
  // @ts-expect-error not a duration
  await t.advance('5 minutes')
  // @ts-expect-error not a date
  await t.advance(new Date())
  // @ts-expect-error the service is read-only
  t.locks = await t.connect()
  // @ts-expect-error a service has no clock to move
  await t.locks.advance(5)
}
