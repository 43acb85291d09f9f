-- Raises the fence of every name to the one that the majority agreed on, if the attempt still has this node's vote.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their fence companions
-- ARGV    1  what the lock keys hold: the owner's token and the attempt
--         2  the fence
-- Answer  1 every name has at least this fence now, 0 the vote is gone (and nothing was changed)

local n = #KEYS / 2

local records = {}
for i = 1, n do
  records[i] = redis.call('GET', KEYS[n + i])
  if redis.call('GET', KEYS[i]) ~= ARGV[1] or not records[i] then
    return 0
  end
end
for i = 1, n do
  local number, rest = string.match(records[i], '^(%d+)(.*)$')
  -- Never lowered.
  if number and tonumber(number) < tonumber(ARGV[2]) then
    redis.call('SET', KEYS[n + i], ARGV[2] .. rest, 'KEEPTTL')
  end
end
return 1
