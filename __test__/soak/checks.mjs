// The checks of the soak, which hold under every fault.

/** The error of a case that cannot run here. The case is skipped; in CI it fails. */
export class LeftOut extends Error {}

/** A list of violations. Equal ones (apart from digits) are counted, and the first one is kept as the example. */
export class Violations {
  #kinds = new Map()

  add(message) {
    const kind = message.replace(/\d+(\.\d+)?/g, '#')
    const known = this.#kinds.get(kind)
    if (known) known.count++
    else this.#kinds.set(kind, { count: 1, message })
  }

  get size() {
    return this.#kinds.size
  }

  lines() {
    return [...this.#kinds.values()].map(({ count, message }) => (count > 1 ? `${message} (${count} times)` : message))
  }
}

/**
 * Records the holds of each name. All processes run on one machine and share its monotonic clock, so two holds of
 * one name must not overlap, and their fencing tokens must grow in order.
 */
export class History {
  #open = new Map()
  #closed = new Map()
  #last = new Map()
  holds = 0

  /** Records a hold that began at `at`. If its process is killed, it lasts until `until` (both in µs). */
  begin(worker, { name, token, at, until }) {
    this.#open.set(`${name} ${token}`, { worker, name, token: BigInt(token), at, end: until })
  }

  /** Records the end of a hold: the holder saw its lease valid at `end` for the last time. */
  end({ name, token, end }) {
    const key = `${name} ${token}`
    const hold = this.#open.get(key)
    if (!hold) return
    this.#open.delete(key)
    this.#close({ ...hold, end })
  }

  /** Ends the holds of a killed process: its leases last until they expire. */
  killed(worker) {
    for (const [key, hold] of this.#open) {
      if (hold.worker !== worker) continue
      this.#open.delete(key)
      this.#close(hold)
    }
  }

  #close(hold) {
    this.holds++
    if (!this.#closed.has(hold.name)) this.#closed.set(hold.name, [])
    this.#closed.get(hold.name).push(hold)
  }

  /** Checks all holds since the last check, against each other and against the last one before. */
  check(violations) {
    for (const [name, holds] of this.#closed) {
      let last = this.#last.get(name)
      for (const hold of holds.sort((one, other) => one.at - other.at)) {
        if (last && hold.at < last.end) {
          violations.add(`${name}: two holders for ${last.end - hold.at} µs, tokens ${last.token} and ${hold.token}`)
        }
        if (last && hold.token <= last.token) violations.add(`${name}: token ${hold.token} after token ${last.token}`)
        last = { token: hold.token, end: Math.max(hold.end, last?.end ?? 0) }
      }
      this.#last.set(name, last)
    }
    this.#closed.clear()
  }
}

/** A resource that refuses tokens smaller than the largest it has seen. No accepted write may lose another one. */
export class Resource {
  #states = new Map()
  writes = 0
  refused = 0

  #state(name, token) {
    if (!this.#states.has(name)) this.#states.set(name, { token: 0n, value: 0 })
    const state = this.#states.get(name)
    if (BigInt(token) < state.token) {
      this.refused++
      return undefined
    }
    state.token = BigInt(token)
    return state
  }

  /** The value; `undefined` when the token is refused. */
  read({ name, token }) {
    return this.#state(name, token)?.value
  }

  /** Writes `value + 1`, where `value` is what the holder read. */
  write({ name, token, value }, violations) {
    const state = this.#state(name, token)
    if (!state) return
    if (state.value !== value)
      violations.add(`${name}: a write with token ${token} lost another one (read ${value}, is ${state.value})`)
    state.value = value + 1
    this.writes++
  }
}

/** Rounds before a process's memory is compared: the first one has the largest burst. */
const WARM_UP_ROUNDS = 1
/** A leak raises the lowest value of this many rounds, too. A burst raises single values, until V8 collects garbage. */
const COMPARED_ROUNDS = 6
const GROWTH_BYTES = 32 * 2 ** 20
const GROWTH_FACTOR = 1.25

/** Compares the memory of the process that lives through all rounds, in bytes, measured at the end of each. */
export class Memory {
  samples = []

  add(rss) {
    this.samples.push(rss)
  }

  check(violations) {
    const compared = this.samples.slice(WARM_UP_ROUNDS)
    if (compared.length < 2 * COMPARED_ROUNDS) return
    const [first, last] = [compared.slice(0, COMPARED_ROUNDS), compared.slice(-COMPARED_ROUNDS)].map((rounds) =>
      Math.min(...rounds),
    )
    if (last > first * GROWTH_FACTOR && last > first + GROWTH_BYTES)
      violations.add(`memory grew from ${mib(first)} to ${mib(last)}`)
  }
}

export const mib = (bytes) => `${Math.round(bytes / 2 ** 20)} MiB`
