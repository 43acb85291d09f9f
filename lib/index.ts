export { isLockError, LockError } from './errors.js'
export { Lock } from './lock.js'
export { LockService } from './service.js'
