// The contract on PostgreSQL.
import { contract } from './contract.mjs'

contract('postgres')
