// The contract on a Redis Cluster, whose names lie on three masters.
import { contract } from './contract.mjs'

contract('redis-cluster')
