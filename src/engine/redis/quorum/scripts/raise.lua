-- Raises the counter of every name to the fencing token of the agreement, if the attempt still has this node's vote.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their fence companions
--         2n+1 .. 3n     their counters (names may share one)
-- ARGV    1  the value of the lock keys: the owner token and the attempt
--         2  the fencing token
-- Answer  1 every counter is at least this token now, 0 the vote is gone (and nothing was changed)

local n, owner = #KEYS / 3, string.match(ARGV[1], '^%x+')

local records = {}
for i = 1, n do
  if redis.call('GET', KEYS[i]) ~= ARGV[1] then
    return 0
  end
  records[i] = redis.call('GET', KEYS[n + i])
end
for i = 1, n do
  redis.call('ZADD', KEYS[n + n + i], 'GT', ARGV[2], 'last')
  -- The record of this owner's grant, if it is written already.
  local number, token, rest = string.match(records[i] or '', '^(%d+) (%x+)( .*)$')
  if number and token == owner and tonumber(number) < tonumber(ARGV[2]) then
    redis.call('SET', KEYS[n + i], ARGV[2] .. ' ' .. token .. rest, 'KEEPTTL')
  end
end
return 1
