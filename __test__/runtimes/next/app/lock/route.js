// The one route of the app. It prints what `bundle.cjs` prints.
import { isLockError, LockService } from 'holdfast'

export const dynamic = 'force-dynamic'

export async function GET() {
  const locks = await LockService.connect('memory:next')
  const held = await locks.using('n', (lock) => lock.isHeld)
  const error = await locks.acquire('').catch((thrown) => thrown)
  await locks.close()
  return new Response(`${held} ${isLockError(error, 'LOCK_INVALID_ARGUMENT')}`)
}
