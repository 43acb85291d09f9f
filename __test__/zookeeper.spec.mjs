// The contract on ZooKeeper.
import { contract } from './contract.mjs'

contract('zookeeper')
