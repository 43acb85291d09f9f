// The contract on a Redis Cluster of three masters.
import { contract } from './contract.mjs'

contract('redis-cluster')
