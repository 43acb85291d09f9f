-- Reads whether the first busy name of a claim is only reserved for another waiter.
--
-- KEYS    1 .. n         the lock keys
-- ARGV    1  the owner's token
-- Answer  0 when no name is busy; the index of the first busy name if it is reserved for another waiter; else -1

for i, key in ipairs(KEYS) do
  local holder = redis.call('GET', key)
  if holder and holder ~= ARGV[1] and holder ~= ARGV[1] .. '-next' then
    return #holder == 37 and string.find(holder, '^%x+%-next$') and i or -1
  end
end
return 0
