/** For how long a name is taken that others try in vain: longer than any part of the benchmark. */
export const HELD_TTL_MS = 1_800_000
