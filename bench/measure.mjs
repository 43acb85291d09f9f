// Measures the calls of contenders, each in a separate process, alternately.
import { startContenders } from './contender-process.mjs'

let run = 0

/** Makes the calls of a load in a contender's process for some milliseconds. Resolves to the figures. */
const callsOf = (what, prefixes) => (contender, inFlight, ms) =>
  contender.ask({ what, inFlight: Number(inFlight), ms, prefix: prefixes.get(contender.name) })

/**
 * Measures `contenders` (names) on a `target`, for each of `loads` (by default numbers of calls in flight) in `rounds` rounds of `ms`
 * milliseconds. `probe` measures the servers meanwhile; `what` is the call: `pair` or `tryHeld`. `shares`: calls may share a request. `start(names)` and
 * `call(contender, load, ms)` are for other loads.
 *
 * Rejects when a contender ends, or its calls send too few commands, apart from `no-lock`.
 *
 * Resolves to the figures of all rounds, by load and by contender: `{ 64: { holdfast: [{ perSecond, … }, …] } }`.
 */
export async function measureAll({ contenders, target, what, loads, probe, rounds, ms, warmUpMs, shares, ...other }) {
  const prefixes = new Map(contenders.map((name) => [name, `bench-${process.pid}-${++run}-${name}-`]))
  const { start = startContenders, call = callsOf(what, prefixes) } = other
  const running = await start(contenders, target)
  if (what === 'tryHeld') await takeAll(contenders, target, Math.max(...loads), prefixes)
  // Tries of one tick may share a command, and calls on PostgreSQL a statement. Other calls write at least once.
  const least = what === 'tryHeld' || shares ? 0 : 0.9
  const results = {}
  for (const load of loads) {
    const requests = {}
    const here = (results[load] = Object.fromEntries(contenders.map((name) => [name, []])))
    for (const contender of running) {
      // With the first load V8 optimises the code that all loads share.
      await call(contender, load, load === loads[0] ? warmUpMs : warmUpMs / 3)
      // Separate from the timed runs: MONITOR makes a server slower.
      requests[contender.name] = await probe.requests?.(async () => (await call(contender, load, warmUpMs / 10)).count)
    }
    for (let round = 0; round < rounds; round++) {
      // The order alternates from round to round: a drift of the machine affects all contenders equally.
      for (const contender of round % 2 === 0 ? running : [...running].reverse()) {
        const spent = await probe.start()
        const result = await call(contender, load, ms)
        const { cpuUs, ...counted } = await spent()
        const each = Object.fromEntries(Object.entries(counted).map(([field, value]) => [field, value / result.count]))
        const sent = requests[contender.name] ?? each.requests
        if (!(sent > least) && contender.name !== 'no-lock')
          throw new Error(
            `${contender.name} sent ${sent.toFixed(2)} commands per call: it does not do what is measured`,
          )
        here[contender.name].push({ ...result, serverUs: cpuUs / result.count, ...each, requests: sent })
      }
    }
  }
  await Promise.all(running.map((contender) => contender.close()))
  return results
}

/** Acquires the names in another process: a service may know the names that it holds itself. */
async function takeAll(contenders, target, count, prefixes) {
  const holders = await startContenders(contenders, target)
  await Promise.all(
    holders.map(async (holder) => {
      await holder.ask({ what: 'take', count, prefix: prefixes.get(holder.name) })
      await holder.kill()
    }),
  )
}
