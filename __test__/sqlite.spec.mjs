import { contract } from './contract.mjs'

contract('sqlite')
