// The contract on MariaDB or MySQL.
import { contract } from './contract.mjs'

contract('mysql')
