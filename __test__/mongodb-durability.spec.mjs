// What a grant survives on MongoDB.
import { mongodb } from './drivers/mongodb.mjs'
import { durability } from './suites/durability.mjs'

durability(mongodb)
