// The client of MySQL and MariaDB in the tests: another tool on the same server.

/**
 * Opens a client of `mysql2`, passes it to `body`, and closes it.
 *
 * @template T
 * @param {string} url
 * @param {(client: any) => T | Promise<T>} body
 */
export async function withMysql(url, body) {
  // Imported here: the tests of the stores without a server run without npm packages.
  const { createConnection } = /** @type {any} */ (await import('mysql2/promise')).default
  const client = await createConnection({ uri: url, multipleStatements: true })
  try {
    return await body(client)
  } finally {
    await client.end()
  }
}
