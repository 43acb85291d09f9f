// A MongoDB database of its own for one test, where our default collection can be the one that others use, too.
import { MongoClient } from 'mongodb'
import { Gist } from './gist.mjs'
import { random, serverUrl } from './stores.mjs'

/** The body of a test on a database of its own. */
export const onDatabase = (kind, body) => async (place, t) => {
  const url = new URL(serverUrl(kind))
  url.pathname = `/holdfast_gist_${random()}`
  place.target = url.href
  place.options = {}
  const client = await MongoClient.connect(place.target)
  const collection = client.db().collection('locks')
  try {
    await body({ place, t, collection, gist: new Gist(collection) })
    await collection.deleteMany({})
  } finally {
    await place.closeServices()
    await client.db().dropDatabase()
    await client.close()
  }
}
