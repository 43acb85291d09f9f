import type { PermitInfo, SharedInfo } from './named.js'
import type { Holder, Json, LockInfo } from './types.js'

/** Creates what `LockInfo` and `PermitInfo` have in common. */
function infoOf({ name, remainingMs, fencingToken, holder, metadata }: any, prefix: string): Omit<LockInfo, 'waiting'> {
  return {
    name: withoutPrefix(name, prefix),
    remainingMs: remainingMs ?? Infinity,
    fencingToken: fencingToken === null ? null : BigInt(fencingToken),
    holder: holderOf(holder),
    metadata: metadataOf(metadata),
  }
}

/** @internal Creates the `LockInfo`s of the native core's JSON text. `prefix` is that of a view, which is omitted. */
export function infosOf(json: string, prefix: string): LockInfo[] {
  return JSON.parse(json).map((info: any) => withTokenAsText({ ...infoOf(info, prefix), waiting: info.waiting }))
}

/** @internal Creates the `SharedInfo` of the native core's JSON text, which has the holders of one shared name. */
export function sharedInfoOf(json: string, name: string, prefix: string): SharedInfo {
  const infos: any[] = JSON.parse(json)
  const holders: PermitInfo[] = infos.map((info) => withTokenAsText({ ...infoOf(info, prefix), ...info.share }))
  return {
    name,
    used: holders.reduce((sum, { permits }) => sum + permits, 0),
    limit: holders.length === 0 ? null : Math.min(...holders.map(({ limit }) => limit)),
    waiting: infos[0]?.waiting ?? 0,
    holders,
  }
}

/** @internal Removes the prefix of a view from a name. */
export function withoutPrefix(name: string, prefix: string): string {
  return name.startsWith(prefix) ? name.slice(prefix.length) : name
}

/** @internal Creates the `Holder` that the native core describes. */
export function holderOf(holder: { host: string; pid: number; since: number } | null): Holder | null {
  return holder && { host: holder.host, pid: holder.pid, since: new Date(holder.since) }
}

/** Parses the metadata of a lock. Text of another tool that is not JSON is ignored. */
function metadataOf(json: string | null): Json {
  try {
    return json === null ? null : JSON.parse(json)
  } catch {
    return null
  }
}

/** @internal Gives an object a `toJSON` that writes its fencing token as decimal text: `JSON.stringify` throws for a bigint. */
export function withTokenAsText<T extends { fencingToken?: bigint | null }>(value: T): T {
  if (typeof value.fencingToken === 'bigint') Object.defineProperty(value, 'toJSON', TO_JSON)
  return value
}

// Not enumerable: the object has the documented properties only.
const TO_JSON: PropertyDescriptor = {
  value: function (this: { fencingToken: bigint }) {
    return { ...this, fencingToken: String(this.fencingToken) }
  },
  configurable: true,
  writable: true,
}
