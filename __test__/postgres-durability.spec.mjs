// What a grant survives on PostgreSQL.
import { postgres } from './drivers/postgres.mjs'
import { durability } from './suites/durability.mjs'

durability(postgres)
