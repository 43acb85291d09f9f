// A separate MongoDB database for one test, in which the default collection can be shared with other tools.
import { Gist } from './gist.mjs'
import { withMongo } from './mongodb-client.mjs'
import { random, serverUrl } from './stores.mjs'

/** Returns the body of a test that runs on a separate database. */
export const withDatabase = (kind, body) => async (store, t) => {
  const url = new URL(String(serverUrl(kind)))
  url.pathname = `/holdfast_gist_${random()}`
  store.target = url.href
  store.options = {}
  await withMongo(store.target, async (client) => {
    const collection = client.db().collection('locks')
    try {
      await body({ store, t, collection, gist: new Gist(collection) })
      await collection.deleteMany({})
    } finally {
      await store.closeServices()
      await client.db().dropDatabase()
    }
  })
}
