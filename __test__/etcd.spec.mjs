// The contract on etcd.
import { contract } from './contract.mjs'

contract('etcd')
