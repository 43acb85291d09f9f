// The contract on PostgreSQL behind PgBouncer in transaction mode.
import { contract } from './contract.mjs'

contract('postgres-pooler')
contract('postgres-pooler-declared')
