-- Rolls back the vote of one attempt. A later attempt of the same owner is not changed.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their metadata companions
-- ARGV    1  the value of the lock keys: the owner token and the attempt
-- Answer  the number of names that were rolled back
--
-- It publishes no message: the name was not held, and an attempt that this vote has blocked is retried anyway.

local n = #KEYS / 2

local removed = 0
for i = 1, n do
  if redis.call('GET', KEYS[i]) == ARGV[1] then
    redis.call('DEL', KEYS[i], KEYS[n + i])
    removed = removed + 1
  end
end
return removed
