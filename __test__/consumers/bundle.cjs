// The program that the bundlers bundle.
const { LockService, isLockError } = require('holdfast')

LockService.connect('memory:bundle').then(async (locks) => {
  const held = await locks.using('n', (lock) => lock.isHeld)
  const error = await locks.acquire('').catch((thrown) => thrown)
  console.log(held, isLockError(error, 'LOCK_INVALID_ARGUMENT'))
  await locks.close()
})
