import { contract } from './contract.mjs'

contract('mongodb-replica-set')
