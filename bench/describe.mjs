// Finds a contender by its name: `redlock-auto` is the variant `auto` of contenders/redlock.mjs.

/** Resolves to what a contender's file says about it, with its `setting` and a `connect(target)` of its variant. */
export async function describe(name) {
  const [, file = name, variant = ''] = /^(holdfast|.*(?=-(?:auto|bare)$))-(\w+)$/.exec(name) ?? []
  const { settings, connect, variants, ...about } = await import(`./contenders/${file}.mjs`)
  return {
    ...about,
    ...variants?.[variant],
    setting: settings?.[variant],
    connect: (target) => connect(target, variant),
  }
}
