// A MongoDB database of its own for one test, where our default collection can be the one that others use, too.
import { MongoClient } from 'mongodb'
import { Gist } from './gist.mjs'
import { random, serverUrl } from './stores.mjs'

/** The body of a test on a database of its own. */
export const withDatabase = (kind, body) => async (store, t) => {
  const url = new URL(serverUrl(kind))
  url.pathname = `/holdfast_gist_${random()}`
  store.target = url.href
  store.options = {}
  const client = await MongoClient.connect(store.target)
  const collection = client.db().collection('locks')
  try {
    await body({ store, t, collection, gist: new Gist(collection) })
    await collection.deleteMany({})
  } finally {
    await store.closeServices()
    await client.db().dropDatabase()
    await client.close()
  }
}
