// The build bundles this file to `dist/index.js`. `index.js`, `testing.js` and `otel.js` export the public names of it.
export { isLockError, LockError } from './errors.js'
export { Election } from './election.js'
export { Lock } from './lock.js'
export { LockService } from './service.js'
export { createTestLocks } from './testing.js'
/** @internal For tests. */
export { shownUrls } from './connection.js'
/** @internal For tests. */
export { native } from './native.js'
/** @internal For `otel.ts`. */
export { callback, fields } from './options.js'
/** @internal For `otel.ts`. */
export { describe, stackOf, warn } from './errors.js'
/** @internal For `otel.ts`. */
export { observe } from './connection.js'
/** @internal For `otel.ts`. */
export { connectionIn } from './service.js'
/** @internal For `otel.ts`. */
export type { Observed } from './connection.js'
/** @internal For `otel.ts`. */
export { kindOf, SOURCE } from './telemetry.js'
/** @internal For `otel.ts`. */
export type { Call, Kind } from './telemetry.js'
