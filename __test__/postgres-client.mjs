// The PostgreSQL client of the tests: another tool on the same server.

/**
 * Opens a client of `pg`, passes it to `body`, and closes it.
 *
 * @template T
 * @param {string} url
 * @param {(client: any) => T | Promise<T>} body
 */
export async function withPostgres(url, body) {
  // Imported here: the tests of the stores without a server run without npm packages.
  const { Client } = /** @type {any} */ (await import('pg')).default
  const client = new Client({ connectionString: url })
  await client.connect()
  try {
    return await body(client)
  } finally {
    await client.end()
  }
}
