// A program in TypeScript. It prints what `bundle.cjs` prints.
import { isLockError, LockService } from 'holdfast'
import type { Lock } from 'holdfast'

const locks = await LockService.connect('memory:tsx')
const held: boolean = await locks.using('n', (lock: Lock) => lock.isHeld)
const error: unknown = await locks.acquire('').catch((thrown) => thrown)
console.log(held, isLockError(error, 'LOCK_INVALID_ARGUMENT'))
await locks.close()
