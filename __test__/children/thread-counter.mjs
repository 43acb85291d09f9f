/** Adds to a counter that all threads share and only the lock protects. */
export async function count(locks, counter, { name, rounds }) {
  for (let round = 0; round < rounds; round++) {
    await locks.using(name, { waitMs: 60_000 }, async () => {
      const seen = counter[0]
      await new Promise((resolve) => setTimeout(resolve, Math.random() * 2))
      counter[0] = seen + 1
    })
  }
}
