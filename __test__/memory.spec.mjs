import { contract } from './contract.mjs'

contract('memory')
