// The contract on one store, for the test runners of other runtimes. HOLDFAST_KIND names the store.
import { contract } from '../contract.mjs'

contract(process.env.HOLDFAST_KIND)
