import { describe, invalid, warn } from './errors.js'

const MAX_MS = 2 ** 31
const HOUR_MS = 3_600_000
const DAY_MS = 24 * HOUR_MS
/** The ttls from here on are checked: milliseconds that were given as seconds are that long. */
const CHECKED_MS = 10_000_000
/** @internal The renewal of a shorter lease may come too late. */
export const SHORT_MS = 100
/** @internal The other form of a duration, for errors. */
export const OR_TEXT = ", or text with a unit such as '30s'"
const UNITS: Record<string, number> = { ms: 1, s: 1000, m: 60_000, h: HOUR_MS }

/** @internal Converts a number, or text with a unit such as `'30s'`, to milliseconds. Other values give `NaN`. */
export function milliseconds(value: unknown): number {
  if (typeof value === 'number') return value
  const [, amount, unit] = (typeof value === 'string' && /^(\d+(?:\.\d+)?)(ms|s|m|h)$/.exec(value)) || []
  return amount === undefined ? NaN : Number(amount) * UNITS[unit!]!
}

/** @internal Checks a duration: more than zero, at most 2^31 ms. Returns milliseconds. */
export function positiveMs(argument: string, value: unknown): number {
  const ms = milliseconds(value)
  if (ms > 0 && ms <= MAX_MS) return ms
  throw invalid(
    argument,
    `must be a number of milliseconds, more than 0 and at most 2147483648${OR_TEXT}`,
    describe(value),
  )
}

/** @internal Checks a duration that may be zero. Returns milliseconds. */
export function spanMs(argument: string, value: unknown): number {
  const ms = milliseconds(value)
  if (ms >= 0 && ms <= MAX_MS) return ms
  throw invalid(argument, `must be a number of milliseconds from 0 to 2147483648${OR_TEXT}`, describe(value))
}

/** @internal Checks a `ttlMs`. Returns milliseconds. */
export function ttlOf(value: unknown): number {
  const ms = positiveMs('ttlMs', value)
  if (ms >= CHECKED_MS) warnIfLong('ttlMs', value, ms)
  return ms
}

/** @internal Checks the `ttlSeconds` of the gist's functions. Returns milliseconds. */
export function secondsOf(value: unknown): number {
  const ms = typeof value === 'number' ? value * 1000 : NaN
  if (!(ms > 0 && ms <= MAX_MS)) {
    throw invalid('ttlSeconds', 'must be a number of seconds, more than 0 and at most 2147483.648', describe(value))
  }
  if (ms >= CHECKED_MS) warnIfLong('ttlSeconds', value, ms)
  return ms
}

/** @internal Warns of a ttl below {@link SHORT_MS} of a lease that is renewed. */
export function warnIfShort(option: 'ttlMs' | 'ttlSeconds', value: unknown, ms: number): void {
  if (warned.short) return
  warned.short = true
  warnOfTtl(option, value, ms, 1000, 'A lease of less than 100 ms may end before its renewal.')
}

/** Checks a long ttl: more than 24 h, or whole thousands of seconds that are not whole hours, which are probably milliseconds. */
function warnIfLong(option: 'ttlMs' | 'ttlSeconds', value: unknown, ms: number): void {
  const isProbablyMs = option === 'ttlSeconds' && ms % 1_000_000 === 0 && ms % HOUR_MS !== 0
  if (warned.long || (ms <= DAY_MS && !isProbablyMs)) return
  warned.long = true
  const risk =
    'If the process of the holder ends without a release, the name stays busy for that long (on ZooKeeper: for the session timeout).'
  warnOfTtl(option, value, ms, 1 / 1000, risk)
}

// One warning of each kind per process.
const warned = { long: false, short: false }

/** Emits a warning with both readings of a number without a unit. `factor`: from one reading to the other. */
function warnOfTtl(option: 'ttlMs' | 'ttlSeconds', value: unknown, ms: number, factor: number, risk: string): void {
  const isNumber = typeof value === 'number'
  const given = isNumber ? `${value} ${option === 'ttlMs' ? 'ms' : 's'}` : String(value)
  const amount =
    ms < HOUR_MS ? (option === 'ttlMs' ? `${ms / 1000} s` : `${ms} ms`) : `${Number((ms / HOUR_MS).toFixed(1))} h`
  const other = isNumber ? `; did you mean ${Number((value * factor).toPrecision(6))}?` : '.'
  warn('HOLDFAST_TTL', `${option}: ${given} is ${amount}${other} ${risk} Later ones are not warned about.`)
}
