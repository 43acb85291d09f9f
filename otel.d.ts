import type { MeterProvider, TracerProvider } from '@opentelemetry/api';
import type { LockService } from './index.js';
/** The options of `instrument`. */
export interface InstrumentOptions {
  /**
   * Returns the value of the attribute `holdfast.name` for a lock's name: `order:42` → `order`. The values must be few. `undefined`, and an
   * error, which is emitted once as a `HoldfastWarning`: the attribute is absent. Default: it is always absent, because the number of names
   * is not limited.
   */
  nameOf?: ((name: string) => string | undefined) | undefined;
  /** Default: the global provider. */
  meterProvider?: MeterProvider | undefined;
  /** Default: the global provider. */
  tracerProvider?: TracerProvider | undefined;
}
/**
 * Records metrics and spans of a lock service, and of its views, with OpenTelemetry. Call it after the start of the SDK: the global
 * provider of metrics is that of the moment of the call.
 *
 * | metric | | attributes |
 * |---|---|---|
 * | `holdfast.wait` | histogram, s: from a call to its end | `outcome`: `acquired`, `busy`, `aborted`, `failed` |
 * | `holdfast.hold` | histogram, s: from a grant to the end of the lease | `outcome`: `released`, `lost` |
 * | `holdfast.acquisitions` | counter: the calls that ended; a restored lock counts as acquired | `outcome` as of `holdfast.wait` |
 * | `holdfast.lost` | counter: the leases that ended before their release | |
 * | `holdfast.held`, `holdfast.waiting` | gauges: the leases that are held, the calls that wait | |
 * | `holdfast.connected` | gauge: 1, or 0 after an operation of the store that failed, until one succeeds | |
 *
 * Spans: `holdfast.acquire` for a call that acquires a lock, and `holdfast.using` for one that runs a job, with the span of its
 * acquisition and those of the job as children; `holdfast.outcome` is `busy` or `aborted` if there was no lock. Both need Node 20.13 or
 * later. Every metric and span has `holdfast.engine`; all but the gauges have `holdfast.kind`: `lock`, `semaphore`, `read`, `write`.
 * Elections have no spans: they wait for days. The gauges of several services on the same kind of store are added (`holdfast.connected`:
 * the smallest), and end with `close()`.
 *
 * @returns a function that ends the recording
 * @throws `LOCK_INVALID_ARGUMENT`
 *
 * @example
 * const stop = instrument(locks, { nameOf: (name) => name.split(':')[0] })
 */
export declare function instrument(locks: LockService, options?: InstrumentOptions): () => void;
