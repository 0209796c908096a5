-- Lowers what windows were charged.
-- ARGV: now_us, epoch, then for each window: name, home, start_us, amount

if is_lost() then
  return {'lost'}
end
for i = 3, #ARGV, 4 do
  local name, home, start_us, amount = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local counter = load(home, name)
  if counter and counter[1] ~= start_us then
    name = name .. '@' .. text(start_us)
    counter = load(home, name)
  end
  if counter then
    counter[3] = math.max(0, counter[3] - amount)
    store(home, name, counter)
  end
end
return {'given'}
