// PostgreSQL's advisory locks on one connection, whose driver sends requests without waiting for replies. All callers of the process
// are one session for the server, so they do not exclude each other: this is what the server and a connection can do at most.
import postgres from 'postgres'

export const kind = 'driver'
export const packages = ['postgres']
export const does = 'no owner check within a process, no fencing token, no ttl: excludes other processes only'
export const settings = {
  '': 'one connection with pipelined statements; `pg_try_advisory_lock` and `pg_advisory_unlock`',
}

export async function connect({ urls: [url] }) {
  const sql = postgres(url, { max: 1 })
  return {
    async pair(name) {
      const [{ got }] = await sql`SELECT pg_try_advisory_lock(hashtextextended(${name}, 0)) AS got`
      if (!got) throw new Error(`${name} was busy`)
      const [{ done }] = await sql`SELECT pg_advisory_unlock(hashtextextended(${name}, 0)) AS done`
      if (!done) throw new Error(`${name} was lost`)
    },
    close: () => sql.end(),
  }
}
