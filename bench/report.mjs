// From measurements to Markdown.
import { readFileSync } from 'node:fs'

export const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)]

function version(name) {
  const file = new URL(`node_modules/${name}/package.json`, import.meta.url)
  return JSON.parse(readFileSync(file, 'utf8')).version.replace(/^v/, '')
}

/** The versions of holdfast and of `packages`. `mongodb3` is the name here of the driver for mongodb-lock. */
export function contenderVersions(packages) {
  const own = JSON.parse(readFileSync(new URL('../package.json', import.meta.url), 'utf8')).version
  const peers = packages.map((name) => `${name === 'mongodb3' ? 'that on mongodb' : name} ${version(name)}`)
  return [`holdfast ${own}`, ...peers].join(', ')
}

/** A MongoDB URL whose writes wait for the majority, whatever a contender's default is. */
export function withMajority(url) {
  const asked = new URL(url)
  asked.searchParams.set('w', 'majority')
  return asked.href
}

export async function serverVersion(store, url) {
  if (store === 'redis') {
    const { default: Redis } = await import('ioredis')
    const redis = new Redis(url)
    const info = await redis.info('server')
    await redis.quit()
    return `Redis ${/redis_version:(\S+)/.exec(info)[1]}`
  }
  const { MongoClient } = await import('mongodb')
  const client = await new MongoClient(url).connect()
  const { version } = await client.db('admin').command({ buildInfo: 1 })
  const { hosts } = await client.db('admin').command({ hello: 1 })
  await client.close()
  return `MongoDB ${version} (${hosts ? `replica set with ${hosts.length} member, majority` : 'standalone'})`
}

const COLUMNS = [
  ['pairs per second', 'perSecond', 0],
  ['event loop, µs per pair', 'loopUs', 1],
  ['client CPU, µs per pair', 'cpuUs', 1],
  ['p50, µs', 'p50Us', 0],
  ['p99, µs', 'p99Us', 0],
]

/** One table per number of calls in flight; each contender's throughput as a ratio to holdfast's, round by round. */
export async function table({ version, results, inFlight }) {
  const lines = [`## ${version}`, '']
  for (const load of inFlight) {
    lines.push(`### ${load} in flight`, '')
    lines.push(`| | ${COLUMNS.map(([title]) => title).join(' | ')} | holdfast is | does |`)
    lines.push(`|---|${'---:|'.repeat(COLUMNS.length)}---:|---|`)
    for (const [module, loads] of Object.entries(results)) {
      const { does } = await import(`./contenders/${module}.mjs`)
      const cells = COLUMNS.map(([, field, digits]) => {
        const values = loads[load].map((result) => result[field])
        const [low, mid, high] = [Math.min(...values), median(values), Math.max(...values)].map((n) => n.toFixed(digits))
        return `${mid} (${low}–${high})`
      })
      const ratio = median(loads[load].map((result, i) => results.holdfast[load][i].perSecond / result.perSecond))
      lines.push(`| ${module} | ${cells.join(' | ')} | ${ratio.toFixed(2)} × | ${does} |`)
    }
    lines.push('')
  }
  return lines.join('\n')
}
