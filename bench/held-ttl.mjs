/** The ttl of names that other processes try to acquire: longer than any part of the benchmark. */
export const HELD_TTL_MS = 1_800_000
