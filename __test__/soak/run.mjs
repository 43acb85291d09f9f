// `npm run soak`: random stalls, kills and bursts on every store, with checks of the guarantees.
//
//   SOAK_S=600        seconds per store
//   SOAK_STORES=a,b   the stores, by their names in faults.mjs; all of them without it
//   SOAK_SEED=1       repeats the faults of an earlier run; a random one is printed without it
//   SOAK_FAULTS=a,b   only these faults, by their names in faults.mjs
//   SOAK_CASES=0      without the long cases of redis.mjs, mongodb.mjs, sqlite.mjs, quorum.mjs, postgres.mjs and mysql.mjs
import { existsSync } from 'node:fs'
import { setTimeout as sleep } from 'node:timers/promises'
import { leftovers } from '../leftovers.mjs'
import { median, StallMeter } from '../tools.mjs'
import { History, LeftOut, Memory, mib, Resource, Violations } from './checks.mjs'
import { FAULTS, KINDS, ServersEnded, startStore, WARM_UP, whenHealthy } from './faults.mjs'
import { Worker } from './process.mjs'

const RECOVERY_MS = 2000
/** A process without a grant for this time counts as one that never recovers. */
const NO_RECOVERY_MS = 20_000
const LEFTOVER_MS = 1000
/** Slack for the machine, in addition to the time for which this process stalled. */
const SLACK_MS = 500
/** The longest lease of a name that several processes use. */
const SHARED_TTL_MS = 5000
/** How long a process that was killed may hold such a name, where that is longer than its lease. */
const SHARED_AFTER_KILL_MS = { etcd: 10_000, zookeeper: 62_000 }
/** The longest lease. */
const LONGEST_TTL_MS = 30_000
/** The queue positions of a killed process, and on MongoDB the documents of its expired leases, stay for a minute. */
const AFTER_KILL_MS = 70_000
const RATES = { mongodb: [50, 150, 300], memory: [300, 1000], other: [100, 300, 1000] }
/** The file with the long cases of a store: `__test__/soak/<name>.mjs`. */
const CASES = {
  redis: 'redis',
  'redis-quorum': 'quorum',
  mongodb: 'mongodb',
  sqlite: 'sqlite',
  postgres: 'postgres',
  mysql: 'mysql',
}

const forSeconds = Number(process.env.SOAK_S ?? 600)
const kinds = process.env.SOAK_STORES?.split(',') ?? KINDS
const seed = Number(process.env.SOAK_SEED ?? Math.floor(Math.random() * 2 ** 31))
const stallMeter = new StallMeter()
/** The cases that cannot run here. */
const skipped = []

for (const kind of kinds)
  if (!KINDS.includes(kind)) throw new Error(`SOAK_STORES: there is no ${kind}; there are ${KINDS.join()}`)

/** A generator of random numbers with a seed (mulberry32). */
function randomFrom(state) {
  return () => {
    state = (state + 0x6d2b79f5) | 0
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state)
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32
  }
}

/** One store under test: its servers, processes and checks. */
class Soak {
  history = new History()
  resource = new Resource()
  memory = new Memory()
  recoveries = []
  granted = 0
  failed = {}
  rounds = { passed: 0, failed: 0, skipped: 0 }
  violations = new Violations()
  /** @type {Worker[]} */
  workers = []
  #killed = []
  #order = []
  #undoneUntil = 0
  /** Whether a server has ended by itself. */
  isOver = false
  /** Whether the fault of this round may have reverted releases. */
  #mayForget = false
  /** Names whose lease expired after that: an SQL table keeps their rows for an hour. */
  #forgotten = new Set()

  constructor(kind, store, random) {
    this.kind = kind
    this.store = store
    this.pick = (list) => list[Math.floor(random() * list.length)]
    this.between = (low, high) => low + random() * (high - low)
    this.options = { keyPrefix: `soak:${Math.random().toString(36).slice(2, 10)}:`, ...store.options }
    this.engine = kind.split('-')[0]
  }

  async start() {
    const count = this.kind === 'memory' ? 1 : 3
    const task = { target: this.store.target, options: this.options }
    const listener = (worker, message) => this.#receive(worker, message)
    this.workers = Array.from({ length: count }, (_, index) => new Worker(index, task, listener))
    await Promise.all(this.workers.map((worker) => worker.start()))
    this.fixture = { ...this, pick: this.pick, between: this.between }
  }

  #receive(worker, message) {
    if (message.begin) this.history.begin(worker.tag, message.begin)
    else if (message.end) this.history.end(message.end)
    else if (message.read) return this.resource.read(message.read)
    else if (message.write) this.resource.write(message.write, this.violations)
    else if (message.violation) this.violations.add(message.violation)
    else if (message.killed) {
      this.history.killed(message.killed)
      this.#killed.push({ tag: message.killed, at: Date.now() })
    }
  }

  /** Picks the next fault: in random order, each as often as the others. */
  #nextFault() {
    if (this.#order.length === 0) {
      const wanted = process.env.SOAK_FAULTS?.split(',')
      this.#order = Object.keys(FAULTS).filter(
        (name) => FAULTS[name].of(this.kind) && (!wanted || wanted.includes(name)),
      )
      for (let rest = this.#order.length - 1; rest > 0; rest--) {
        const other = Math.floor(this.between(0, rest + 1))
        ;[this.#order[rest], this.#order[other]] = [this.#order[other], this.#order[rest]]
      }
    }
    return FAULTS[this.#order.pop()]
  }

  #all(verb, order) {
    return Promise.all(this.workers.map((worker) => worker.ask(verb, order)))
  }

  async round(number) {
    const startedAt = Date.now()
    const facts = []
    let done
    try {
      done = await this.#underLoad(number === 1 ? WARM_UP : this.#nextFault(), facts)
      await this.#afterwards(facts)
    } catch (error) {
      this.violations.add(error.stack)
      this.isOver = error instanceof ServersEnded
      // The next round starts without the load and the locks of this one.
      for (const verb of ['rest', 'close']) await Promise.allSettled(this.workers.map((worker) => worker.ask(verb)))
    }
    this.history.check(this.violations)
    this.memory.check(this.violations)
    const isGood = this.violations.size === 0
    this.rounds[isGood ? 'passed' : 'failed']++
    const seconds = ((Date.now() - startedAt) / 1000).toFixed(0)
    console.log(
      `${isGood ? 'ok    ' : 'FAILED'} ${this.kind} round ${number}, ${seconds} s: ${[done, ...facts].join('; ')}`,
    )
    for (const line of this.violations.lines()) console.log(`       ${line}`)
    this.violations = new Violations()
  }

  /** Opens the services, starts their load, and causes the fault. */
  async #underLoad(fault, facts) {
    await this.#all('open')
    const rate = this.pick(RATES[this.engine] ?? RATES.other)
    await this.#all('work', { contenders: 3, rate: rate / this.workers.length })
    await sleep(this.between(500, 2000))
    const outcome = await fault.run(this.fixture)
    const { done, healthyAt } = typeof outcome === 'string' ? { done: outcome } : outcome
    if (fault.recovers) await this.#recovery(healthyAt ?? (await whenHealthy(this.store)), facts)
    if (fault.forgetsReleases?.(this.kind)) {
      this.#undoneUntil = Date.now() + LONGEST_TTL_MS
      this.#mayForget = true
    }
    await sleep(1000)
    return `${done}, ${rate} pairs per second`
  }

  /** Checks that every process gets a grant soon after the servers answer again. */
  async #recovery(healthyAt, facts) {
    const stalledMs = stallMeter.totalMs
    const end = Date.now() + NO_RECOVERY_MS
    const grants = await Promise.all(
      this.workers.map(async (worker) => {
        while (!(worker.lastProbe > healthyAt) && Date.now() < end) await sleep(20)
        return worker.probes.find((at) => at > healthyAt)
      }),
    )
    const slowest = Math.max(...grants.map((at) => (at === undefined ? Infinity : (at - healthyAt) / 1000)))
    this.recoveries.push(slowest)
    if (slowest === Infinity) this.violations.add(`no recovery within ${NO_RECOVERY_MS / 1000} s`)
    else if (slowest > RECOVERY_MS + SLACK_MS + stallMeter.totalMs - stalledMs) {
      this.violations.add(`recovery took ${Math.round(slowest)} ms`)
    }
    facts.push(slowest === Infinity ? 'no recovery' : `recovery ${Math.round(slowest)} ms`)
  }

  /** Ends the load, closes the services, and checks what is left in the store. */
  async #afterwards(facts) {
    const listed = await this.#all('rest')
    // Names of killed processes are free when their leases have expired.
    const lastKill = this.#killed.at(-1)?.at ?? 0
    const heldMs = SHARED_AFTER_KILL_MS[this.kind] ?? SHARED_TTL_MS
    const freeAt = Math.max(lastKill + heldMs + LEFTOVER_MS, this.#undoneUntil)
    await sleep(Math.max(0, freeAt - Date.now()))
    if (this.#mayForget) {
      this.#mayForget = false
      const expired = (await this.#found()).filter(({ isExpired }) => isExpired)
      for (const { name } of expired) this.#forgotten.add(name)
      if (expired.length > 0) facts.push(`${expired.length} leases expired`)
    }
    await this.#nothingLeft('2 s after the last call', 2 * LEFTOVER_MS, /^held:/)
    if (this.kind === 'memory') {
      const names = listed[0].filter((name) => !name.startsWith('held:'))
      if (names.length > 0) this.violations.add(`${names.length} locks without a holder: ${names[0]}`)
    }
    const closing = await this.#all('close')
    await this.#nothingLeft('1 s after close', LEFTOVER_MS)
    const memory = await this.#all('memory')
    if (this.workers[0].tag === 'w0.0') this.memory.add(memory[0])
    let granted = 0
    for (const counts of await this.#all('counts')) {
      granted += counts.granted
      for (const [code, count] of Object.entries(counts.failed)) this.failed[code] = (this.failed[code] ?? 0) + count
    }
    this.granted += granted
    facts.push(`${granted} grants`, `close ${Math.max(...closing)} ms`, `memory ${mib(memory[0])}`)
  }

  #found() {
    return leftovers({ engine: this.engine, target: this.store.target, options: this.options })
  }

  /** Checks that nothing is left but names that match `allowed`, and what killed processes held. */
  async #nothingLeft(when, withinMs, allowed) {
    const [end, stalledMs] = [Date.now() + withinMs, stallMeter.totalMs]
    for (;;) {
      const isExpected = (lock) =>
        allowed?.test(lock.name) || this.#isOfKilled(lock) || (lock.isExpired && this.#forgotten.has(lock.name))
      const left = (await this.#found()).filter((lock) => !isExpected(lock))
      if (left.length === 0) return
      if (Date.now() > end + SLACK_MS + stallMeter.totalMs - stalledMs) {
        const examples = left.slice(0, 3).map(({ what, name }) => `${what} ${name}`)
        return this.violations.add(`${left.length} keys left ${when}: ${examples.join(', ')}`)
      }
      await sleep(100)
    }
  }

  #isOfKilled({ what, name, isExpired }) {
    if ((what === 'queue' || isExpired) && this.#killed.some(({ at }) => Date.now() - at < AFTER_KILL_MS)) return true
    return this.#killed.some(({ tag }) => name.split(':').includes(tag))
  }

  async stop() {
    for (const worker of this.workers) worker.kill('SIGKILL')
    await this.store.stop()
  }
}

/** Runs each long case of a store once. A case that cannot run here is skipped; in CI it fails. */
async function runCases(kind) {
  const file = new URL(`${CASES[kind]}.mjs`, import.meta.url)
  const count = { passed: 0, failed: 0, skipped: 0 }
  if (process.env.SOAK_CASES === '0' || !CASES[kind] || !existsSync(file)) return count
  for (const [name, run] of Object.entries(await import(file.href))) {
    if (typeof run !== 'function') continue
    const startedAt = Date.now()
    const took = () => `${((Date.now() - startedAt) / 1000).toFixed(0)} s`
    try {
      const facts = await run()
      count.passed++
      console.log(
        `ok     ${kind} case ${name}, ${took()}${facts ? `: ${typeof facts === 'string' ? facts : JSON.stringify(facts)}` : ''}`,
      )
    } catch (error) {
      if (error instanceof LeftOut && !process.env.CI) {
        count.skipped++
        skipped.push(`${kind} case ${name}: ${error.message}`)
        continue
      }
      count.failed++
      console.log(`FAILED ${kind} case ${name}, ${took()}\n       ${error.stack.replace(/\n/g, '\n       ')}`)
    }
  }
  return count
}

async function soak(kind) {
  const store = await startStore(kind)
  const run = new Soak(kind, store, randomFrom(seed + KINDS.indexOf(kind)))
  try {
    await run.start()
    const end = Date.now() + forSeconds * 1000
    for (let number = 1; !run.isOver && (number === 1 || Date.now() < end); number++) {
      await run.round(number)
      if (run.workers.some((worker) => worker.isUnresponsive))
        await Promise.all(run.workers.map((worker) => worker.replaceIfUnresponsive()))
    }
  } finally {
    await run.stop()
  }
  return run
}

function summary({ kind, rounds, granted, history, resource, failed, recoveries, memory }) {
  const finite = recoveries.filter(Number.isFinite)
  const [middle, longest] = [median(recoveries), Math.max(...recoveries)].map(Math.round)
  const recovery = recoveries.length === 0 ? 'none' : `median ${middle} ms, longest ${longest} ms`
  const samples = memory.samples.map(mib)
  return [
    `${kind}: ${rounds.passed} rounds passed, ${rounds.failed} failed`,
    `${granted} grants, ${history.holds} holds compared, ${resource.writes} guarded writes, ${resource.refused} refused`,
    `failed calls ${JSON.stringify(failed)}`,
    `recoveries ${finite.length} of ${recoveries.length}: ${recovery}`,
    `memory ${samples[0] ?? '-'} after the first round, ${samples.at(-1) ?? '-'} after the last`,
  ].join('; ')
}

console.log(`SOAK_SEED=${seed}, ${forSeconds} s for each of ${kinds.join(', ')}`)
const total = { passed: 0, failed: 0, skipped: 0 }
const summaries = []
for (const kind of kinds) {
  for (const count of [
    await runCases(kind),
    (await soak(kind).then((run) => (summaries.push(summary(run)), run))).rounds,
  ]) {
    total.passed += count.passed
    total.failed += count.failed
    total.skipped += count.skipped
  }
}
console.log(`\nSummary, SOAK_SEED=${seed}`)
for (const line of summaries) console.log(line)
for (const line of skipped) console.log(`skipped: ${line}`)
console.log(`${total.passed} passed, ${total.failed} failed, ${total.skipped} skipped`)
process.exit(total.failed > 0 ? 1 : 0)
