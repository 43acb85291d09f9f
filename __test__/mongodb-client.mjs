// The MongoDB client of the tests: another tool on the same server.

/** Returns the URL of the server at a port of this machine, whichever role it has in a replica set. */
export const directUrl = (port) => `mongodb://127.0.0.1:${port}/holdfast?directConnection=true`

/**
 * Opens a client of the official driver, passes it to `body`, and closes it.
 *
 * @template T
 * @param {string} url
 * @param {(client: import('mongodb').MongoClient) => T | Promise<T>} body
 */
export async function withMongo(url, body) {
  // Imported here: the tests of the stores without a server run without npm packages.
  const { MongoClient } = await import('mongodb')
  const client = await MongoClient.connect(url)
  try {
    return await body(client)
  } finally {
    await client.close()
  }
}
