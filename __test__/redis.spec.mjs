import { contract } from './contract.mjs'

contract('redis')
